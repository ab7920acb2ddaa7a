"""Programs around `saccade bench`: shapes without weights, runs where nothing can be installed."""
