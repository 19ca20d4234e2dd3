"""Games small enough to be walked through whole: what policies are worth, what beats them, and how to solve them."""
