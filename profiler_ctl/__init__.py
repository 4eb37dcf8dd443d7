"""Who profiles, when, and whether it worked."""
