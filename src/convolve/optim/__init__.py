"""Parameter groups, update rules and learning-rate schedules."""
