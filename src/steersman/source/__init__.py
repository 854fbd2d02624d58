"""Where Services and EndpointSlices come from: a directory of manifests or an API server."""
