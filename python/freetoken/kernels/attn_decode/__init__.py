"""One-query (decode) attention over paged KV."""
