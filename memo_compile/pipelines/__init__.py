"""Cuts a model into the stages of a pipeline: ``memo_compile.pipeline_split``."""
