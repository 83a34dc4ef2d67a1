"""Tests of speculative decoding without servers."""
