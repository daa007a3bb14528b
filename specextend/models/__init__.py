"""Models: their files, whether they are served and fit each other, and loading them."""
