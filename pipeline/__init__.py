"""What happens to a document, from input file to output row; knows nothing of Ray."""
