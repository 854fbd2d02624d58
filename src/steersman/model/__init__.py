"""Values that the whole program speaks in: names, Kubernetes objects, plans. No behaviour."""
