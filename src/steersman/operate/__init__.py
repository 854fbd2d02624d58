"""Questions that operators ask, as library functions with typed answers; they print nothing."""
