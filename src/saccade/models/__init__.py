"""The networks: what a checkpoint's configuration and tensors become.

takes   a checkpoint; then embeddings, positions and pages, step by step
gives   features of views, hidden states, logits
owns    the weights
never   knows a request, a batch or a schedule; keeps anything between two calls but index tables
"""
