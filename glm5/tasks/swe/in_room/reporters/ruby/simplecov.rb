# Stands for libraries that test helpers load and tests do not need: coverage and the choice of gem versions.
module NotNeeded
  def method_missing(*) = block_given? ? nil : self
  def respond_to_missing?(*) = true
  def const_missing(*) = self
end

module SimpleCov
  extend NotNeeded
end

module Bundler
  extend NotNeeded
end

module Kernel
  def gem(*) = true # the libraries are on the load path, not installed as gems
end
