import Foundation
import SpeculativeStreaming

// swift run -c release Ask EXPORTED-FOLDER "what's the grid with time +37.949? CREATE TABLE ..."
let arguments = CommandLine.arguments
guard arguments.count == 3 else {
    print("usage: Ask FOLDER PROMPT")
    exit(2)
}
let model = try await StreamingModel(folder: URL(filePath: arguments[1]))
let prompt = try model.promptTokens(arguments[2])
let started = Date()
var shown = ""
var tokens: [Int] = []
let answer = try model.generate(prompt: prompt, maxTokens: 256) { more in
    // The whole text so far, since a character can be several tokens.
    tokens += more
    let text = model.tokenizer.decode(tokens: tokens, skipSpecialTokens: true)
    print(text.dropFirst(shown.count), terminator: "")
    fflush(stdout)
    shown = text
}
let seconds = Date().timeIntervalSince(started)
let perCall = Double(answer.tokens.count) / Double(answer.calls)
print(String(format: "\n[%d tokens, %.1f tokens/s, %.2f tokens per call]",
    answer.tokens.count, Double(answer.tokens.count) / seconds, perCall))
