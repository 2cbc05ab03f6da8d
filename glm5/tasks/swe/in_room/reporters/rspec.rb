# Formatter of RSpec: one JSON line per example; see suite.py.
require "json"
require "rspec/core"

class OwnReporter
  RSpec::Core::Formatters.register self, :example_passed, :example_failed, :example_pending, :message, :close

  def initialize(_output)
    @file = File.open(ENV.delete("REPORT"), "w")
    @file.sync = true
    @root = File.realpath(ENV["APP_ROOT"]) + "/"
  end

  def example_passed(event) = told(event.example, "passed")
  def example_pending(event) = told(event.example, "skipped")
  def example_failed(event) = told(event.example, "failed", event.exception)

  def message(event)
    return unless event.message.include?("error occurred")

    @file.puts JSON.generate({ broken: true, file: "", message: event.message })
  end

  def close(_event) = @file.puts(JSON.generate({ end: true }))

  private

  def told(example, outcome, error = nil)
    groups = example.example_group.parent_groups.reverse.map(&:description)
    @file.puts JSON.generate({
      file: File.expand_path(example.metadata[:rerun_file_path]).delete_prefix(@root),
      # generated descriptions show objects by an id that differs from run to run
      titles: [*groups, example.description].map { |t| t.to_s.scrub.gsub(/(#<[\w:]+:0x)\h+/, '\1') },
      outcome: outcome, seconds: example.execution_result.run_time || 0,
      message: error ? "#{error.class}: #{error.message}".scrub : "",
      stack: error ? (error.backtrace || []).join("\n").scrub : ""
    })
  end
end
