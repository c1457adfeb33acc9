"""Data sets: catalog, lookup, file formats, augmentation and loading."""
