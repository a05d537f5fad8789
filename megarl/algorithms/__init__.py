"""KL controllers, under the import paths of the quickstart."""
