"""Resource pools, under the import paths of the quickstart."""
