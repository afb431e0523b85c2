"""The Dask adapter: the only place that knows the shapes of its messages."""
