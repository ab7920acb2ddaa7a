"""Words to token ids and back.

takes   messages or prompts, token ids of the engine's `Delta`s
gives   prompt ids with media placeholders; text in increments, stop strings applied
owns    the tokenizer and the compiled chat template
never   imports torch; lets text of a user become a control token
"""
