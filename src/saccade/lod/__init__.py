"""Level of detail (LOD): which regions of an image get visual tokens, given the question.

detail.py sizes the global view and the budget, texture.py describes the image, scorers.py scores its regions
in three ways, relevance_pass.py reads from the KV cache where the question attends, balance.py weighs the
scores, allocate.py spends tokens, and controller.py runs these as one decision.
"""
