"""Transfer of a pretrained model to other images: features of the frozen model, their cache, a classifier on them."""
