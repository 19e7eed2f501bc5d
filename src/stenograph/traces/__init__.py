"""The record: trees, stores, samples, the ledger."""
