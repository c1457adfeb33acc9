"""Where images come from: known data sets, their file formats, lookup, download, and single pictures for prediction."""
