"""Parameter groups, optimizers and learning-rate schedules."""
