"""Static embeddings of short texts."""
