"""Networks: a checkpoint's configuration and tensors become modules. They know no request and no schedule."""
