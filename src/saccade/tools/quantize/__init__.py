"""`saccade quantize`: writes a compressed-tensors checkpoint from a 16-bit one."""
