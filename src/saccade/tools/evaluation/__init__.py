"""`saccade eval`: how often a checkpoint answers right, task by task, and what fewer visual tokens cost.

takes   a checkpoint, the fixed questions of `saccade.pictures`
gives   accuracies with their intervals, every answer as JSON, the resizing curve, agreement with a peer
owns    the way a picture is made smaller for a token limit
never   decides what is right: that is `pictures.correct`
"""
