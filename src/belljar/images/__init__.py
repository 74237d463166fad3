"""Container images: made from this host's own files or from Dockerfiles, named, listed, removed."""
