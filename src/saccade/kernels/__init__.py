"""The arithmetic that deserves a kernel of its own, each beside its plain torch twin.

takes   tensors and numbers
gives   tensors; the twin defines what the answer means, and is the path wherever no kernel applies
never   imports anything of ours, keeps state
"""
