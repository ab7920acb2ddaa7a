"""Scenes with questions and known answers: what the embedded model is trained and evaluated on."""
