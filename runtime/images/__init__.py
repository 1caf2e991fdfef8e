"""Images in prompts: their pixels, their rows from the vision tower, and their places among the tokens."""
