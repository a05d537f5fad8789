"""Worker groups and the trainer, under the import paths of the quickstart."""
