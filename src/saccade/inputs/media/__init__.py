"""Images and videos from untrusted bytes to RGB pixels. Never connects to an unchecked address."""
