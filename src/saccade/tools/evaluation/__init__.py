"""`saccade eval` and `saccade eval-lod`: accuracy on the fixed question set, and the cost of fewer visual
tokens."""
