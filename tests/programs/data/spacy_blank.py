# on request: spacy
import spacy

print([token.text for token in spacy.blank("en")("Give it back, now.")])
