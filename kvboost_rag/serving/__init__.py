"""One request, from the prompt to the answer."""
