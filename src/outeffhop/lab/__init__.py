"""What needs more than the library: data, training, the paper's experiments and their reports (``outeffhop[lab]``)."""
