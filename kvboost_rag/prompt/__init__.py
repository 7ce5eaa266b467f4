"""From a prompt's text to typed segments of token ids, and back to text."""
