"""From a corpus to chunks with encoding contexts, encoded ahead of questions."""
