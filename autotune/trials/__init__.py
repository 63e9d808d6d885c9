"""Running one trial of a study: what it is given, its process, its numbers, whether the machine left it alone."""
