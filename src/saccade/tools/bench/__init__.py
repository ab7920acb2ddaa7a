"""The measured truth about an engine: named workloads, run the way users run them.

takes   the options of an engine and of a measurement
gives   a table, and a JSON document with every sample
owns    the engine or server it measures, for as long as it measures
never   is imported by anything but the command line
"""
