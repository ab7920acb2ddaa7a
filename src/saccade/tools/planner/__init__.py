"""The planner: how much traffic a model on a machine carries, before either is there.

takes   a model's sizes, a memory size, a traffic mix, what a step costs
gives   how many requests fit, which limit binds, the waits to expect
owns    a virtual clock
never   imports torch or sleeps; it plays the real scheduler, so what it says of scheduling is what happens
"""
