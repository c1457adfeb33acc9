"""Several processes as one training: who is who, how they start, and how they add up what they found."""
