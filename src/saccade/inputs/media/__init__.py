"""Pictures and videos, from bytes of anybody to RGB pixels and views.

takes   URLs, bytes, PIL images, arrays; `MediaLimits`
gives   uint8 RGB pixels, content hashes, `View`s, video timestamps
owns    nothing that outlives a call
never   imports torch; lets a private address be connected to; lets a library's exception out untyped
"""
