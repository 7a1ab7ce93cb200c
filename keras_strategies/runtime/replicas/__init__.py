"""Replicas of one computation: their set, collectives and gradients."""
