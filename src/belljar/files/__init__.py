"""Files that cross between host and guest: into the work directory, out of it, its removal."""
