"""Layer 2: conversion of text to tokens and back: chat templates, tokenizers, detokenization, stop strings."""
