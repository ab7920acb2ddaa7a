"""Kernels, each beside its PyTorch reference. They import nothing of ours and keep no state."""
