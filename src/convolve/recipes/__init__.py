"""Recipes: choose every option of a run from the data, the machine and the time that is available."""
