"""Level of detail (LOD): which regions of an image get visual tokens, given the question.

texture.py describes the image, scorers.py scores its regions in three ways, balance.py weighs the scores,
allocate.py spends tokens, choose.py runs these as one decision. global_view.py sizes the global view, and
relevance_pass.py reads from the KV cache where the question attends.
"""
