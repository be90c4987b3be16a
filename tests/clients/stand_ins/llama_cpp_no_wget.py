"""The tests' helpers import it to fetch models; with an external server they fetch none."""
