"""Level of detail: which parts of a picture deserve many tokens, given the question.

`texture` describes the picture, `relevance` scores it three ways, `balance` weighs the scores against each
other, `allocate` spends tokens, `choose` is the four as one decision; `glance` sizes the first look.
"""
