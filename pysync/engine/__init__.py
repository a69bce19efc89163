"""What the verbs of documents, files and logs do, and how their changes are announced."""
