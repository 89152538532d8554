"""The stream-fused model."""
